"""The consumer: fetches the elements of an iteration, and says what it has used."""
