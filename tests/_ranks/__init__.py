"""Runs the tests that need ranks.

The outer pytest, which people start, collects everything and reports everything. For a test with
the mark ``ranks`` it starts ``mpidist run`` with a pytest in each rank (the inner ones), tells them
over a local socket which test to run, and makes one report of theirs. So it is the outer process
that keeps the ranks in step and watches the time, without MPI, which the tests may break.
"""
