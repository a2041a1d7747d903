"""Helpers and cases of several test files."""
