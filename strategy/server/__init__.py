"""A ps task: owns its variables, and is the only one to say who changes them."""
