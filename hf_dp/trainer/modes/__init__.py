"""How privacy is obtained: one small class a mode."""
