"""Whether evaluation rows are training rows."""
