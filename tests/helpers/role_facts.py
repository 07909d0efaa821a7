"""What a person found by hand: the name of every role in every architecture, and fused layouts.

A heading `==` names the architectures that the lines below it hold for; it may take several lines.
A line is a path and then, for each weight under it, `roles=name@layout`: the roles in the order of
the rows, `name:parameter` for a parameter that is no module, `*` for any number, `-` for no path.
Layouts are those that LAYOUTS in test_roles.py draws.
"""

FACTS = """\
== gpt2
transformer.h.*.attn o=c_proj q,k,v=c_attn@blk3
transformer.h.*.mlp down=c_proj up=c_fc
- head=lm_head
transformer embed=wte pos_embed=wpe
== gpt_neo
transformer.h.*.attn.attention k=k_proj o=out_proj q=q_proj v=v_proj
transformer.h.*.mlp down=c_proj up=c_fc
- head=lm_head
transformer embed=wte pos_embed=wpe
== gptj
transformer.h.*.attn k=k_proj o=out_proj q=q_proj v=v_proj
transformer.h.*.mlp down=fc_out up=fc_in
- head=lm_head
transformer embed=wte
== gpt_neox
gpt_neox.layers.*.attention o=dense q,k,v=query_key_value@head3
gpt_neox.layers.*.mlp down=dense_4h_to_h up=dense_h_to_4h
- head=lm_head
gpt_neox embed=embed_in
== gpt_bigcode
transformer.h.*.attn o=c_proj q,k,v=c_attn@mqa
transformer.h.*.mlp down=c_proj up=c_fc
- head=lm_head
transformer embed=wte pos_embed=wpe
== gpt_bigcode_mha
transformer.h.*.attn o=c_proj q,k,v=c_attn@head3
transformer.h.*.mlp down=c_proj up=c_fc
- head=lm_head
transformer embed=wte pos_embed=wpe
== opt
model.decoder.layers.*.self_attn k=k_proj o=out_proj q=q_proj v=v_proj
model.decoder.layers.* down=fc2 up=fc1
- head=lm_head
model.decoder embed=embed_tokens pos_embed=embed_positions
== bloom falcon_mha_alibi
transformer.h.*.self_attention o=dense q,k,v=query_key_value@head3
transformer.h.*.mlp down=dense_4h_to_h up=dense_h_to_4h
- head=lm_head
transformer embed=word_embeddings
== falcon_mq
transformer.h.*.self_attention o=dense q,k,v=query_key_value@mqa
transformer.h.*.mlp down=dense_4h_to_h up=dense_h_to_4h
- head=lm_head
transformer embed=word_embeddings
== falcon_new
transformer.h.*.self_attention o=dense q,k,v=query_key_value@group
transformer.h.*.mlp down=dense_4h_to_h up=dense_h_to_4h
- head=lm_head
transformer embed=word_embeddings
== llama mistral qwen2 qwen3 gemma gemma2 olmo2 granite cohere stablelm mistral_swa gemma3_text
model.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.layers.*.mlp down=down_proj gate=gate_proj up=up_proj
- head=lm_head
model embed=embed_tokens
== phi3
model.layers.*.self_attn o=o_proj q,k,v=qkv_proj@blkgqa
model.layers.*.mlp down=down_proj gate,up=gate_up_proj@glu2
- head=lm_head
model embed=embed_tokens
== phi
model.layers.*.self_attn k=k_proj o=dense q=q_proj v=v_proj
model.layers.*.mlp down=fc2 up=fc1
- head=lm_head
model embed=embed_tokens
== starcoder2
model.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.layers.*.mlp down=c_proj up=c_fc
- head=lm_head
model embed=embed_tokens
== deepseek_v2 deepseek_v3
model.layers.*.self_attn k,v=kv_b_proj@mla_kvb kv=kv_a_proj_with_mqa o=o_proj q=q_a_proj
model.layers.*.self_attn q=q_b_proj
model.layers.*.mlp down=down_proj expert_down=experts:down_proj
model.layers.*.mlp expert_gate,expert_up=experts:gate_up_proj@glu2 gate=gate_proj
model.layers.*.mlp router=gate:weight up=up_proj
model.layers.*.mlp.shared_experts shared_down=down_proj shared_gate=gate_proj shared_up=up_proj
- head=lm_head
model embed=embed_tokens
== mixtral qwen3_moe olmoe
model.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.layers.*.mlp expert_down=experts:down_proj expert_gate,expert_up=experts:gate_up_proj@glu2
model.layers.*.mlp router=gate:weight
- head=lm_head
model embed=embed_tokens
== qwen2_moe
model.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.layers.*.mlp expert_down=experts:down_proj expert_gate,expert_up=experts:gate_up_proj@glu2
model.layers.*.mlp router=gate:weight shared_router=shared_expert_gate
model.layers.*.mlp.shared_expert shared_down=down_proj shared_gate=gate_proj shared_up=up_proj
- head=lm_head
model embed=embed_tokens
== gpt_oss
model.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.layers.*.mlp expert_down=experts:down_proj
model.layers.*.mlp expert_gate,expert_up=experts:gate_up_proj@glu_il router=router:weight
- head=lm_head
model embed=embed_tokens
== granitemoe
model.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.layers.*.block_sparse_moe expert_down=experts:down_proj
model.layers.*.block_sparse_moe expert_gate,expert_up=experts:gate_up_proj@glu2
model.layers.*.block_sparse_moe router=router:weight
- head=lm_head
model embed=embed_tokens
== mpt
transformer.blocks.*.attn o=out_proj q,k,v=Wqkv@blk3
transformer.blocks.*.ffn down=down_proj up=up_proj
- head=lm_head
transformer embed=wte
== xglm
model.layers.*.self_attn k=k_proj o=out_proj q=q_proj v=v_proj
model.layers.* down=fc2 up=fc1
- head=lm_head
model embed=embed_tokens
== bert
bert.encoder.layer.*.attention.self k=key q=query v=value
bert.encoder.layer.*.attention.output o=dense
bert.encoder.layer.*.intermediate up=dense
bert.encoder.layer.*.output down=dense
cls.predictions head=decoder
bert.embeddings embed=word_embeddings pos_embed=position_embeddings
bert.embeddings pos_embed=token_type_embeddings
cls.predictions.transform other=dense
== roberta
roberta.encoder.layer.*.attention.self k=key q=query v=value
roberta.encoder.layer.*.attention.output o=dense
roberta.encoder.layer.*.intermediate up=dense
roberta.encoder.layer.*.output down=dense
lm_head head=decoder other=dense
roberta.embeddings embed=word_embeddings pos_embed=position_embeddings
roberta.embeddings pos_embed=token_type_embeddings
== electra
electra.encoder.layer.*.attention.self k=key q=query v=value
electra.encoder.layer.*.attention.output o=dense
electra.encoder.layer.*.intermediate up=dense
electra.encoder.layer.*.output down=dense
- head=generator_lm_head
electra.embeddings embed=word_embeddings pos_embed=position_embeddings
electra.embeddings pos_embed=token_type_embeddings
generator_predictions other=dense
== deberta_v2
deberta.encoder.layer.*.attention.self k=key_proj other=pos_key_proj other=pos_query_proj
deberta.encoder.layer.*.attention.self q=query_proj v=value_proj
deberta.encoder.layer.*.attention.output o=dense
deberta.encoder.layer.*.intermediate up=dense
deberta.encoder.layer.*.output down=dense
cls.predictions head=decoder
deberta.embeddings embed=word_embeddings pos_embed=position_embeddings
cls.predictions.transform other=dense
== modernbert
model.layers.*.attn o=Wo q,k,v=Wqkv@blk3
model.layers.*.mlp down=Wo gate,up=Wi@glu2
- head=decoder
model.embeddings embed=tok_embeddings
head other=dense
== bert_cls
bert.encoder.layer.*.attention.self k=key q=query v=value
bert.encoder.layer.*.attention.output o=dense
bert.encoder.layer.*.intermediate up=dense
bert.encoder.layer.*.output down=dense
- head=classifier
bert.embeddings embed=word_embeddings pos_embed=position_embeddings
bert.embeddings pos_embed=token_type_embeddings
bert.pooler other=dense
== deberta_v1
deberta.encoder.layer.*.attention.self other=pos_proj other=pos_q_proj q,k,v=in_proj@head3
deberta.encoder.layer.*.attention.output o=dense
deberta.encoder.layer.*.intermediate up=dense
deberta.encoder.layer.*.output down=dense
cls.predictions head=decoder
deberta.embeddings embed=word_embeddings pos_embed=position_embeddings
cls.predictions.transform other=dense
== distilbert
distilbert.transformer.layer.*.attention k=k_lin o=out_lin q=q_lin v=v_lin
distilbert.transformer.layer.*.ffn down=lin2 up=lin1
- head=vocab_projector other=vocab_transform
distilbert.embeddings embed=word_embeddings pos_embed=position_embeddings
== t5
encoder.block.*.layer.*.SelfAttention k=k o=o pos_embed=relative_attention_bias q=q v=v
decoder.block.*.layer.*.SelfAttention k=k o=o pos_embed=relative_attention_bias q=q v=v
decoder.block.*.layer.*.EncDecAttention cross_k=k cross_o=o cross_q=q cross_v=v
encoder.block.*.layer.*.DenseReluDense down=wo up=wi
decoder.block.*.layer.*.DenseReluDense down=wo up=wi
- embed=shared head=lm_head
encoder embed=embed_tokens
decoder embed=embed_tokens
== t5_gated mt5
encoder.block.*.layer.*.SelfAttention k=k o=o pos_embed=relative_attention_bias q=q v=v
decoder.block.*.layer.*.SelfAttention k=k o=o pos_embed=relative_attention_bias q=q v=v
decoder.block.*.layer.*.EncDecAttention cross_k=k cross_o=o cross_q=q cross_v=v
encoder.block.*.layer.*.DenseReluDense down=wo gate=wi_0 up=wi_1
decoder.block.*.layer.*.DenseReluDense down=wo gate=wi_0 up=wi_1
- embed=shared head=lm_head
encoder embed=embed_tokens
decoder embed=embed_tokens
== bart pegasus
model.encoder.layers.*.self_attn k=k_proj o=out_proj q=q_proj v=v_proj
model.decoder.layers.*.self_attn k=k_proj o=out_proj q=q_proj v=v_proj
model.decoder.layers.*.encoder_attn cross_k=k_proj cross_o=out_proj cross_q=q_proj
model.decoder.layers.*.encoder_attn cross_v=v_proj
model.encoder.layers.* down=fc2 up=fc1
model.decoder.layers.* down=fc2 up=fc1
- head=lm_head
model embed=shared
model.encoder embed=embed_tokens pos_embed=embed_positions
model.decoder embed=embed_tokens pos_embed=embed_positions
== whisper
model.encoder.layers.*.self_attn k=k_proj o=out_proj q=q_proj v=v_proj
model.decoder.layers.*.self_attn k=k_proj o=out_proj q=q_proj v=v_proj
model.decoder.layers.*.encoder_attn cross_k=k_proj cross_o=out_proj cross_q=q_proj
model.decoder.layers.*.encoder_attn cross_v=v_proj
model.encoder.layers.* down=fc2 up=fc1
model.decoder.layers.* down=fc2 up=fc1
- head=proj_out
model.decoder embed=embed_tokens pos_embed=embed_positions
model.encoder pos_embed=embed_positions
== moonshine
model.encoder.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.decoder.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.decoder.layers.*.encoder_attn cross_k=k_proj cross_o=o_proj cross_q=q_proj
model.decoder.layers.*.encoder_attn cross_v=v_proj
model.encoder.layers.*.mlp down=fc2 up=fc1
model.decoder.layers.*.mlp down=fc2 up,gate=fc1@glu2_up
- head=proj_out
model.decoder embed=embed_tokens
== wav2vec2
wav2vec2.encoder.layers.*.attention k=k_proj o=out_proj q=q_proj v=v_proj
wav2vec2.encoder.layers.*.feed_forward down=output_dense up=intermediate_dense
- head=lm_head
wav2vec2.feature_projection other=projection
== wav2vec2_bert
wav2vec2_bert.encoder.layers.*.self_attn k=linear_k o=linear_out q=linear_q v=linear_v
wav2vec2_bert.encoder.layers.*.ffn1 down=output_dense up=intermediate_dense
wav2vec2_bert.encoder.layers.*.ffn2 down=output_dense up=intermediate_dense
- head=lm_head
wav2vec2_bert.feature_projection other=projection
== parakeet
encoder.layers.*.self_attn k=k_proj o=o_proj other=relative_k_proj q=q_proj v=v_proj
encoder.layers.*.feed_forward1 down=linear2 up=linear1
encoder.layers.*.feed_forward2 down=linear2 up=linear1
encoder.subsampling other=linear
== vit
vit.layers.*.attention k=k_proj o=o_proj q=q_proj v=v_proj
vit.layers.*.mlp down=fc2 up=fc1
- head=classifier
vit.embeddings.patch_embeddings embed=projection
== swin
swin.encoder.layers.*.blocks.*.attention k=k_proj o=o_proj q=q_proj v=v_proj
swin.encoder.layers.*.blocks.*.mlp down=fc2 up=fc1
- head=classifier
swin.embeddings.patch_embeddings embed=projection
swin.encoder.layers.*.downsample other=reduction
== clip
text_model.encoder.layers.*.self_attn k=k_proj o=out_proj q=q_proj v=v_proj
vision_model.encoder.layers.*.self_attn k=k_proj o=out_proj q=q_proj v=v_proj
text_model.encoder.layers.*.mlp down=fc2 up=fc1
vision_model.encoder.layers.*.mlp down=fc2 up=fc1
- head=text_projection head=visual_projection
text_model.embeddings embed=token_embedding pos_embed=position_embedding
vision_model.embeddings embed=patch_embedding pos_embed=position_embedding
== llava
model.multi_modal_projector projector=linear_1 projector=linear_2
model.language_model.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.language_model.layers.*.mlp down=down_proj gate=gate_proj up=up_proj
model.vision_tower.encoder.layers.*.self_attn vision_k=k_proj vision_o=out_proj vision_q=q_proj
model.vision_tower.encoder.layers.*.self_attn vision_v=v_proj
model.vision_tower.encoder.layers.*.mlp vision_down=fc2 vision_up=fc1
- head=lm_head
model.language_model embed=embed_tokens
model.vision_tower.embeddings vision_embed=patch_embedding vision_pos_embed=position_embedding
== qwen2_vl
model.visual.merger.mlp projector=*
model.language_model.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.language_model.layers.*.mlp down=down_proj gate=gate_proj up=up_proj
model.visual.blocks.*.attn vision_o=proj vision_q,vision_k,vision_v=qkv@blk3
model.visual.blocks.*.mlp vision_down=fc2 vision_up=fc1
- head=lm_head
model.language_model embed=embed_tokens
== mllama
model projector=multi_modal_projector
model.language_model.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.language_model.layers.*.mlp down=down_proj gate=gate_proj up=up_proj
model.language_model.layers.*.cross_attn cross_k=k_proj cross_o=o_proj cross_q=q_proj
model.language_model.layers.*.cross_attn cross_v=v_proj
model.vision_model.transformer.layers.*.self_attn vision_k=k_proj vision_o=o_proj
model.vision_model.transformer.layers.*.self_attn vision_q=q_proj vision_v=v_proj
model.vision_model.global_transformer.layers.*.self_attn vision_k=k_proj vision_o=o_proj
model.vision_model.global_transformer.layers.*.self_attn vision_q=q_proj vision_v=v_proj
model.vision_model.transformer.layers.*.mlp vision_down=fc2 vision_up=fc1
model.vision_model.global_transformer.layers.*.mlp vision_down=fc2 vision_up=fc1
- head=lm_head
model.language_model embed=embed_tokens
model.vision_model vision_embed=patch_embedding
== idefics
model.layers.*.self_attn k=k_proj o=o_proj q=q_proj v=v_proj
model.layers.*.mlp down=down_proj gate=gate_proj up=up_proj
model.gated_cross_attn_layers.*.mlp down=down_proj gate=gate_proj up=up_proj
model.gated_cross_attn_layers.*.cross_attn cross_k=k_proj cross_o=o_proj cross_q=q_proj
model.gated_cross_attn_layers.*.cross_attn cross_v=v_proj
model.vision_model.encoder.layers.*.self_attn vision_k=k_proj vision_o=out_proj vision_q=q_proj
model.vision_model.encoder.layers.*.self_attn vision_v=v_proj
model.vision_model.encoder.layers.*.mlp vision_down=fc2 vision_up=fc1
- head=lm_head
lm_head head=additional_fc
model embed=embed_tokens
model.embed_tokens embed=additional_embedding
model.vision_model.embeddings vision_embed=patch_embedding vision_pos_embed=position_embedding
== codegen
transformer.h.*.attn o=out_proj q,v,k=qkv_proj@mp4
transformer.h.*.mlp down=fc_out up=fc_in
- head=lm_head
transformer embed=wte
== minimax
model.layers.*.self_attn k=k_proj o=o_proj o=out_proj q=q_proj v=v_proj q,k,v=qkv_proj@head3
model.layers.*.self_attn other=output_gate
model.layers.*.mlp expert_down=experts:down_proj expert_gate,expert_up=experts:gate_up_proj@glu2
model.layers.*.mlp router=gate:weight
- head=lm_head
model embed=embed_tokens
"""
