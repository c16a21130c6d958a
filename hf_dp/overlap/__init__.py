"""A check of whether evaluation rows are training rows."""
