"""Prompts to count experts by where the user brings none: short, and of many kinds, which use different ones."""

PROMPTS = (
    "Once upon a time there was a fox who lived at the edge of a small village.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how fast it is.",
    "Why is the sky blue, and why is the evening sky red?",
    "Erkläre in einfachen Worten, wie eine Brücke so viele Autos tragen kann.",
    "A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive? Show each step.",
    "Summarise the causes of the French Revolution in five sentences.",
    "SELECT customer, SUM(price) FROM orders GROUP BY customer; -- what does this return, and which index would help?",
    "Dear Ms Okafor, thank you for your letter of last week about the broken heating. We would like to",
    "Traduis en anglais : Il pleuvait depuis trois jours et le fleuve montait encore.",
    "List the ingredients and the steps for a vegetable soup for four people.",
    '{"name": "Ada", "languages": ["en", "fr"], "address": {"city": "London"',
    "A patient has had a fever and a stiff neck since yesterday. Which questions does a doctor ask first?",
    "void swap(int * a, int * b) {",
    "请用三句话介绍一下长城的历史。",
    "Prove that the square root of two is irrational.",
    "The quarterly report shows that revenue grew by 4 % while costs fell. What should the board ask?",
)
"""Of the same kinds in both halves, which are held against each other."""
