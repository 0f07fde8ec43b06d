"""What a user types. One thin module per command, loaded only when it is asked for: `primerl-hpc --help` is instant."""
