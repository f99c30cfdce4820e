"""Train and evaluate agents that were written for other systems, without changing them.

    item ──▶ ExternalAgentTask ──▶ a command or a function, with a base URL and its own key
                               │ sends its usual HTTP requests to models
                               ▼
                           AgentModelServer ──▶ the rollout's tree of calls
    reward(AgentRun) ◀──── exit code, output, files, tree

    agent_task.py            the task: items, the agent, its reward; all that is checked beforehand
    agent_job.py             what an agent is given: folder, item, addresses, key, environment
    agent_attempt.py         one rollout: limits, and which of its outcomes are learned from
    run_function_agent.py    a Python function as the agent
    agent_command.py         a command as the agent: its arguments, its environment, its process
    agent_container.py       Docker as the place of a command
    agent_result.py          what a reward sees

The HTTP endpoint is in ``evaluate/agent_model_server.py``; ``engine/external_conversations.py``
finds out which request continues which call.
"""
