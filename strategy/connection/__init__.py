"""A worker's line to the ps tasks: what it asks of them, and what it does in their memory."""
