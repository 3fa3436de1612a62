"""Migrations of the ledger's schema; Alembic runs them."""
