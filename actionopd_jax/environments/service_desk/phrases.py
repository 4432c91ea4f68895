"""The lines of the customer and of the expert: a few wordings for each, from one small vocabulary."""

OPENINGS = {
    "cancel": ("I want to cancel my {item}.", "Please cancel my {item}.", "Can you cancel my {item}?"),
    "address": ("Please change the address of my {item}.", "I moved, my {item} must go to a new address."),
    "refund": ("I want a refund for my {item}.", "Please refund my {item}.", "Can I get a refund for my {item}?"),
    "exchange": ("I want to exchange my {item}.", "Can you exchange my {item}?", "Please exchange my {item}."),
    "credit": ("My {item} is late, I want a credit.", "I still wait for my {item}, can I get a credit?"),
    "email": ("I want to change my email.", "Please change my email."),
    "safety": ("My {item} caught fire.", "There is smoke from my {item}."),
    "fraud": ("I did not order the {item}.", "Someone else ordered the {item} in my name."),
    "status": ("What is the status of my {item}?", "Where is my {item}?"),
    "price": ("What did I pay for my {item}?", "What is the price of my {item}?"),
    "where": ("Which address does my {item} go to?", "To which address do you send my {item}?"),
    "days": ("How many days ago was my {item} {status}?", "When was my {item} {status}?"),
}
GREETINGS = ("", "Hi. ", "Hello. ")
NEXT = ("Thanks. Also, one more thing. ", "Okay. Also, another request. ")
OWN_EMAIL = ("My email is {email}.", "It is {email}.", "The email is {email}.")
OWN_ORDER = ("The order number is {order}.", "It is order {order}.", "My order is {order}.")
NO_ORDER = ("I do not have the number. My email is {email}.", "I can not find it. My email is {email}.")
DETAILS = {
    "address": ("The new address is {detail}.", "Send it to {detail}."),
    "exchange": ("I want a {detail} instead.", "The new item is a {detail}."),
    "email": ("The new email is {detail}.", "Please use {detail}."),
    "damaged": ("It is damaged.", "It came damaged."),
    "wrong item": ("It is the wrong item.", "You sent the wrong item."),
    "unwanted": ("I do not want it any more.", "I do not like it."),
}
YES = ("Yes, please.", "Yes, go ahead.", "Yes.")
DECLINE = ("No, I changed my mind.", "No, leave it as it is.")
WRONG = ("No, that is wrong. ", "That is wrong. ")
NOT_DONE = ("That is not done yet. ", "You did not answer me yet. ")
CONFUSED = ("Sorry, I do not understand. ", "What do you mean? ")

ASK_IDENTITY = {
    ("email",): ("What is your email?", "Please tell me your email."),
    ("order",): ("What is your order number?", "Please tell me your order number."),
    ("email", "order"): ("What is your email or order number?", "Please tell me your email or order number."),
}
ASK_DETAIL = {
    "address": ("What is the new address?", "Please tell me the new address."),
    "exchange": ("Which item do you want instead?", "Please tell me the new item."),
    "email": ("What is the new email?", "Please tell me the new email."),
    "refund": ("What is the reason?", "Please tell me the reason."),
}
CONFIRM = {
    "cancel": ("Shall I cancel order {order}?", "I can cancel order {order}. Do you confirm?"),
    "address": (
        "Shall I change the address of order {order} to {detail}?",
        "I can change the address of order {order} to {detail}. Do you confirm?",
    ),
    "refund": (
        "Shall I refund order {order}, reason {detail}?",
        "I can refund order {order}, reason {detail}. Do you confirm?",
    ),
    "exchange": (
        "Shall I exchange order {order} for a {detail}?",
        "I can exchange order {order} for a {detail}. Do you confirm?",
    ),
    "email": ("Shall I change your email to {detail}?", "I can change your email to {detail}. Do you confirm?"),
}
DONE = {
    "cancel": ("Done, order {order} is cancelled.", "I cancelled order {order}."),
    "address": ("Done, the address of order {order} is changed.", "I changed the address of order {order}."),
    "refund": ("Done, order {order} is refunded.", "I refunded order {order}."),
    "exchange": ("Done, order {order} is exchanged.", "I exchanged order {order}."),
    "credit": ("Done, the credit for order {order} is added.", "I added the credit for order {order}."),
    "email": ("Done, your email is changed.", "I changed your email."),
    "escalate": ("Done, order {order} is escalated.", "I escalated order {order}."),
}
NOTHING_CHANGED = ("Okay, nothing is changed.", "Okay, I changed nothing.")
MORE = (" Anything else?", " Is there anything else?")
REFUSE = {
    "cancel": ("Sorry, I can not cancel order {order}, {why}.", "I can not cancel order {order}, {why}."),
    "address": (
        "Sorry, I can not change the address of order {order}, {why}.",
        "I can not change the address of order {order}, {why}.",
    ),
    "refund": ("Sorry, I can not refund order {order}, {why}.", "I can not refund order {order}, {why}."),
    "exchange": ("Sorry, I can not exchange order {order}, {why}.", "I can not exchange order {order}, {why}."),
    "credit": ("Sorry, I can not credit order {order}, {why}.", "I can not credit order {order}, {why}."),
    "email": ("Sorry, I can not change your email, {why}.", "I can not change your email, {why}."),
}
WHY = {
    "status": "it is {status}",
    "days": "it was {status} {days} days ago and the limit is {limit}",
}
INFORM = {
    "status": ("Order {order} is {status}.", "Your order {order} is {status}."),
    "price": ("Order {order} cost {price} dollars.", "You paid {price} dollars for order {order}."),
    "where": ("Order {order} goes to {address}.", "We send order {order} to {address}."),
    "days": ("Order {order} was {status} {days} days ago.", "Your order {order} was {status} {days} days ago."),
}
