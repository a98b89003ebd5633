"""Do the tests notice faults? Mutation testing (DeMillo, Lipton and Sayward 1978) with faults chosen by hand."""
