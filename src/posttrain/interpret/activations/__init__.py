"""Hidden states: sites, recording, storage."""
