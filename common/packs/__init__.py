"""What a pack says of itself: pack.toml, the report block, the skeleton of a new one."""
