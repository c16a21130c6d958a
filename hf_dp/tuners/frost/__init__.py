"""DP-FROST: choose privately which weight matrices to train, then train only those."""
