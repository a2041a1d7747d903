"""What workers and ps tasks both know: memory, its layout, and arithmetic."""
