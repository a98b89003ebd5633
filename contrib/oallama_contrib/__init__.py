"""Extensions of oallama: rival policies and `bench --matrix`. Entry points name them; oallama imports nothing here."""
