"""From a task to training samples: environments, teachers, trajectories.

Reading order: env_client → env_pool → environments → agent_sampling → runner → trajectories, images → traces →
prompt_logprobs → teacher → self_teacher → distillation.
"""
