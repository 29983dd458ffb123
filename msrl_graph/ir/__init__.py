"""The intermediate representation: the graph of an algorithm, the plan, and what both are made of. Plain data,
immutable."""
