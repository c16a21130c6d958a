"""What a private run says about itself: the statement, ``privacy.json`` and the model card."""
