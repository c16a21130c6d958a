"""What hf_dp uses of other libraries beyond their public API.

The private methods of Trainer that ``hf_dp.trainer`` overrides stay there, and those of TRL in
``trl_preparation``. A test lists all of them and fails by name where one is gone or has changed.
"""
