"""The engine: `engine.Engine` schedules, dispatches and commits steps. Around it are loading, the sizes of cache and
programs, recovery from failed steps, and what the engine does beside steps: adapters, pages in lower tiers, new
weights."""
