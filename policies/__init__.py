"""Policy files (TOML) and their JSON Schema."""
