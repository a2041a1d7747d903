"""The dispatcher: what is known of datasets, jobs, workers and consumers, and who does what."""
