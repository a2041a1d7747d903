"""Code that workers and ps tasks share: memory layouts, messages and arithmetic."""
