"""Published figures of the papers beside what the simulator gives on their testbeds."""
