"""The written policy that the student reads, and the same rules as a function."""

SYSTEM = """You are the service desk of a small shop. Policy:
- First identify the customer by email or order number and look it up.
- Cancel or change the address only while the order is processing.
- Refund or exchange only delivered orders, within 30 days, gold customers 60.
- Credit only orders shipped more than 10 days ago: 10, gold 20.
- Escalate safety and fraud.
- Before you cancel, refund, exchange or change an address or email, name the change and get a yes.
- If the policy forbids a request, refuse and say why.
- One request at a time. Then ask if there is anything else."""

CHANGES = ("cancel", "address", "refund", "exchange", "credit", "email", "escalate")
"""Kinds of request that change the database."""

IRREVERSIBLE = ("cancel", "address", "refund", "exchange", "email")
"""Those that need the customer's yes."""

TOOL_OF = {
    "cancel": "cancel_order",
    "address": "change_address",
    "refund": "refund_order",
    "exchange": "exchange_item",
    "credit": "apply_credit",
    "email": "update_email",
    "escalate": "escalate",
}
DETAIL_OF = {"address": "address", "refund": "reason", "exchange": "item", "email": "new_email"}
"""The fact that a change needs from the customer, besides whom or what it is about."""


def return_limit(tier: str) -> int:
    """Days after delivery within which a refund or an exchange is allowed."""
    return 60 if tier == "gold" else 30


def credit_amount(tier: str) -> int:
    """Dollars of credit for a late order."""
    return 20 if tier == "gold" else 10


def obstacle(kind: str, status: str, days: int, tier: str) -> str:
    """Why the policy forbids a change: "" (it does not), "status" (wrong state) or "days" (too late or too early)."""
    if kind in ("cancel", "address"):
        return "" if status == "processing" else "status"
    if kind in ("refund", "exchange"):
        if status != "delivered":
            return "status"
        return "days" if days > return_limit(tier) else ""
    if kind == "credit":
        if status != "shipped":
            return "status"
        return "" if days > 10 else "days"
    return ""
