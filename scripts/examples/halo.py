"""Solve the heat equation on a rod that is divided over the ranks.

The ranks form a line. In each step, a rank sends its first and its last cell to its neighbours and
receives the nearest cells of the neighbours (the halo). The ends of the rod stay at 100 and at 0
degrees. The result is the same for any number of ranks that divides 60.

    $ mpidist run -n 4 scripts/examples/halo.py
    temperatures: [97.7 75.  54.1 36.2 21.7 10.1  2.   1. ]
    $ mpiexec -n 3 python scripts/examples/halo.py
    temperatures: [97.7 75.  54.1 36.2 21.7 10.1  2.   1. ]
    $ python scripts/examples/halo.py
    temperatures: [97.7 75.  54.1 36.2 21.7 10.1  2.   1. ]
"""

import numpy as np

import mpidist as dist

CELLS, STEPS = 60, 1500

group = dist.init_process_group()
line = dist.new_cartesian_group((group.size(),), periodic=False)

own = np.zeros(CELLS // line.size())
# The parts of the previous and of the next rank. At an end of the line there is no neighbour, and
# the part keeps its value: the temperature of that end of the rod.
halo = np.array([[100.0], [0.0]])
for _ in range(STEPS):
    line.neighbor_all_to_all(halo, own[[0, -1]].reshape(2, 1))
    padded = np.concatenate([halo[0], own, halo[1]])
    own += 0.4 * (padded[:-2] - 2 * own + padded[2:])

rod = np.empty(CELLS)
line.all_gather_into_tensor(rod, own)
if line.rank() == 0:
    print("temperatures:", rod[[0, 10, 20, 30, 40, 50, 58, 59]].round(1))
