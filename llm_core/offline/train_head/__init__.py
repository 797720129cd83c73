"""Training of draft heads on conversations that the target model generates."""
