"""Spend computation where it is not substitutable: predict CFS from the residual, and keep the heads an input needs."""
