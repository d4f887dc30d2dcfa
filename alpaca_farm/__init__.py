"""Simulate learning from human feedback: every method is a notebook, a command and a module.

A module of a method has its settings and a function that makes the run, and returns it:

    from alpaca_farm.ppo import PPOConfig, train
    train(PPOConfig(kl_coef=0.02, out='runs/my_ppo'))   # as python -m alpaca_farm.ppo --help says

    world, sft, annotators, reward_model       the simulated world, the first model, labels, rewards
    best_of_n, expert_iteration, ppo, dpo, binary_feedback, quark, rrhf, wombat, rlcd    methods
    eval, overoptimization, farm, bench, decide                                         results
    bring_your_own, look_at_data, labelling, real                                    your own data

The folders below them: run, data, ask, model, judging, train, worlds and boards.
"""
__version__ = "0.5.0"
