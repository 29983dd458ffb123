"""Which part of each tensor a rank holds, and how weights move between layouts."""
