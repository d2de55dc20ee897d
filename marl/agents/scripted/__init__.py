"""Players that follow a script: partners and opponents, and the source of the text that small models start from."""
