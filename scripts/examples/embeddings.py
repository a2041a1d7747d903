"""Learn embeddings of words in a table that is divided over the ps tasks.

Workers pull and push only the rows of the words in a batch.

    $ mpidist run --ps 2 --worker 2 scripts/examples/embeddings.py
    nearest to apple: pear plum
    nearest to red: blue green
    nearest to one: three two
    $ python scripts/examples/embeddings.py
    nearest to apple: pear plum
    nearest to red: blue green
    nearest to one: three two
"""

import numpy as np

import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from strategy import IndexedSlices, ParameterServerStrategy, get_variable, optimizers, partitioners

TOPICS = (("apple", "pear", "plum"), ("red", "green", "blue"), ("one", "two", "three"))
WORDS = [word for topic in TOPICS for word in topic]


def train(strategy: ParameterServerStrategy, server: mpidist.Server, num_ps: int) -> None:
    """Train on one worker: words of one topic get similar rows, other words do not."""
    with strategy.scope():
        table = get_variable(
            "embeddings",
            shape=(len(WORDS), 8),
            initializer="glorot_uniform",
            partitioner=partitioners.FixedShardsPartitioner(num_ps),
        )
    optimizer = optimizers.Adagrad(0.3)
    random = np.random.default_rng(strategy.worker_index)
    for _ in range(300):
        a, b = random.integers(len(WORDS), size=(2, 16))  # 16 pairs of words
        rows_a, rows_b = table.gather(a), table.gather(b)
        together = a // 3 == b // 3  # True if both words have the same topic
        error = 1 / (1 + np.exp(-(rows_a * rows_b).sum(1, keepdims=True))) - together[:, None]
        # The gradients of a word that occurs several times are added.
        rows = np.concatenate([error * rows_b, error * rows_a]).astype("float32")
        optimizer.apply_gradients([(IndexedSlices(rows, np.concatenate([a, b])), table)])
    strategy.finish()
    server.job_group("worker").barrier()
    if strategy.is_chief:
        rows = table.read_value()
        for word in (0, 3, 6):
            nearest = sorted(WORDS[n] for n in (rows @ rows[word]).argsort()[-3:] if n != word)
            print(f"nearest to {WORDS[word]}:", *nearest)


resolver = MPIClusterResolver(jobs={"ps": 2, "worker": -1})
spec = resolver.cluster_spec()
with mpidist.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id) as server:
    if resolver.task_type == "ps":
        server.join()
    else:
        train(ParameterServerStrategy(resolver), server, spec.num_tasks("ps"))
