"""A deployment before it exists: what fits, and how long steps take, estimated from data sheets and from programs
compiled for devices that are not there."""
