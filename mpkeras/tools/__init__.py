"""Tools that show, measure and write what happens to the numbers: each a room of its own, on `shared` and `seams`."""
