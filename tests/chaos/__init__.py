"""The fault laboratory: a cluster of real processes under a seeded load and seeded faults, watched from
outside. `./dev chaos --help`; docs/chaos.md says what it does."""
