"""Routers of mixture-of-experts models: balancing, and replay of the choices made while sampling."""
