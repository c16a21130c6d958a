"""What a run may claim, and the evidence: facts, statement, wording, privacy.json, verification."""
