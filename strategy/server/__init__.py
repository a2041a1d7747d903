"""A ps task, which owns its variables and applies all changes to them."""
