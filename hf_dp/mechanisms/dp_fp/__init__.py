"""DP-FP (Du and Mi 2021): noise on the representation that enters the last layer."""
