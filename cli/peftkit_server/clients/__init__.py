"""Further APIs for chats: OpenAI's Responses and Anthropic's Messages."""
