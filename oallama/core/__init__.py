"""Records, units and errors shared by all packages; imports none of them."""
