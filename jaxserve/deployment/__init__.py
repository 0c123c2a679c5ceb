"""Records of deployments: everything that answers depend on, described and compared."""
