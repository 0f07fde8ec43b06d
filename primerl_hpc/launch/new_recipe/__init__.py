"""Write a recipe for a model and a number of GPUs: what `primerl-hpc new` does.

Reading order: request (what the user chose) → sizing (the planner's layout, and the fewest GPUs) → blocks (the keys of
the recipe) → draft (text with comments, checked by planning it). prime_rl: recipes from configurations of prime-rl.
"""
