"""The gated delta rule over states that sequences keep in their slots, a file for each backend."""
