"""Which parameters train: selections, private or not, and hf_dp's own adapters.

Stock adapters come from PEFT.
"""
