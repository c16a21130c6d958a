"""Tasks that ship with hf_dp: public synthetic data for demonstrations."""
