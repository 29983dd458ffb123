"""Which box of which tensor a rank holds, and what moves from one layout to another."""
