"""The report on a job that hangs: look at the ranks, find the cause, and say it.

* :mod:`~mpidist.launcher.hang.facts` asks the ranks and reads the run folder.
* :mod:`~mpidist.launcher.hang.activity` describes the main thread of each rank.
* :mod:`~mpidist.launcher.hang.causes` finds the ranks for which the others wait, and why.
* :mod:`~mpidist.launcher.hang.report` makes the texts.
"""
