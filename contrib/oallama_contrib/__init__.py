"""Extensions of oallama: policies of other papers and `bench --matrix`. Entry points name them; oallama imports nothing
here."""
