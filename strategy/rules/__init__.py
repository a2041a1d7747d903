"""Update rules: arithmetic on arrays, without messages and threads."""
