/* A routing in its three forms, and each from each: top-k ids, rows sorted by expert (grouped GEMM), and blocks (the
   blockwise layer). And what ranks exchange where experts are distributed over them. */
#ifndef MOE_API_ROUTING_H
#define MOE_API_ROUTING_H

#include "context.h"

#include "begin.h"

/* ----------------------------------------------------------------------------------------------------------- forms */

/* The T*K slots, token*K + k, have an expert each or none. The forms:
     topk     expert_index: the expert of each slot, or -1. It says all
     sorted   m_sizes, gather_indices: the slots position by position, expert 0's first (moe_grouped_gemm_*). It says
              all
     blocks   token_position_to_id, block_to_expert, conditions: the tokens in blocks of B rows, each block of one
              expert (moe_blockwise_mm_*). It does not say which of its token's slots a row is
   moe_routing_from_<form> reads that form and writes the tensors of the two others that are not NULL; with each of them
   the numbers that follow from it. The order of an expert's rows is
     from topk     ascending slots, so ascending tokens: a stable sort
     from sorted   as they are sorted
     from blocks   as they lie in the blocks, of which an expert's need not follow each other
   An expert twice for a token is two rows, in blocks as well. moe_route_blocks makes one row of them, with the sum of
   their weights: that is for the blockwise layer, which has one affinity for both. Blocks are written as
   moe_route_blocks does: experts in ascending order, ceil(rows/B) blocks each, then padding rows; blocks that are not
   needed belong to expert E-1 and have condition 0.
   What is lost, and what then stands for it:
     to blocks     the slot. From blocks a token's rows become its slots 0, 1, ... in ascending order of experts, unless
                   slot_experts tells which slot had which expert
     capacity      an expert's last rows. Dropped slots are slots without an expert in every tensor that is written
   Errors: NULL_ARGUMENT, INVALID_SHAPE (negative m_sizes or more rows than slots; N too small for this routing; with
   block_per_expert N != E or capacity > B; more rows of a token than K), INVALID_OPTION, INVALID_INDEX (an id out of
   range; a slot at two positions; a row that slot_experts has no slot for), OVERFLOW, MISALIGNED, OVERLAP, WORKSPACE,
   OUT_OF_MEMORY. Tensors without elements may be NULL.
   Sources: semantics of Unsloth's grouped_gemm, nkilib's moe_cte and megablocks' bins. */
typedef struct moe_routing_args {
  int64_t T, E, K; /* tokens, from 0; experts, experts per token, from 1 */
  int64_t B, N;    /* rows of a block, from 1; blocks, from 0; not read without token_position_to_id */
  /* topk */
  int32_t *expert_index; /* [T,K] */
  /* sorted */
  int32_t *m_sizes;        /* [E]: rows of each expert */
  int32_t *gather_indices; /* [T*K]: the slot at each position; after the last row it is not read, and written as -1 */
  /* blocks */
  int32_t *token_position_to_id; /* [N*B]: the token of row r of block b at b*B+r, or the padding id */
  int32_t *block_to_expert;      /* [N]; from blocks E is no expert, and NULL means block b is expert b's, with N = E */
  int32_t *conditions;           /* [N+1] (optional): 0 for blocks that do not count, 1 for others; the last is 0 and
                                    is not read */
  int skip_token;                /* the padding id is 0: T; 1: -1 */
  int block_per_expert;          /* to blocks, 1: N = E, and block e is expert e's (the dropping layer) */
  const int32_t *slot_experts;   /* [T,K] from blocks (optional): as expert_index. A row of token t and expert e is the
                                    first slot of t that has e and no row yet */
  int64_t capacity;              /* not from blocks: an expert's most rows; 0 = no limit, B with block_per_expert */
  /* All optional. */
  int64_t *tokens_per_expert; /* [E] output: rows before dropping */
  int32_t *slot_positions;    /* [T,K] output: the position of each slot, or -1: the inverse of gather_indices */
  int32_t *bins;              /* [E] output: m_sizes added up, each with those before (megablocks: bins) */
  int32_t *padded_bins;       /* [E] output: the same of m_sizes rounded up to whole bin_multiples */
  int64_t bin_multiple;       /* 0 = 128 */
  void *workspace;            /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_routing_args;

#define MOE_DECLARE_ROUTING_(form)                                                            \
  MOE_API moe_status moe_routing_from_##form(moe_context *ctx, const moe_routing_args *args); \
  MOE_API moe_status moe_routing_from_##form##_workspace_size(                                \
      moe_context *ctx, const moe_routing_args *args, size_t *bytes);
MOE_DECLARE_ROUTING_(topk)
MOE_DECLARE_ROUTING_(sorted)
MOE_DECLARE_ROUTING_(blocks)
#undef MOE_DECLARE_ROUTING_

/* ------------------------------------------------------------------------------------------ experts on many ranks */

/* The first expert of a rank: the E experts are distributed in contiguous ranges of E/ranks, of which the first
   E % ranks ranks have one more. For rank = ranks it is E; -1 if an argument is out of range. */
MOE_API int64_t moe_expert_parallel_first(int64_t E, int64_t ranks, int64_t rank);

/* What this rank sends to each: counts and displacements as MPI_Alltoallv takes them, in rows, or in elements with
   row_elements. The rows for rank d are those of d's experts, sorted as by moe_routing_from_topk, so that they lie side
   by side; with one_per_token a token goes to a rank once, however many of its experts are there, tokens ascending.
   The metadata tensor of nkilib's all_to_all_v has the rows send counts, send displacements, receive counts, receive
   displacements, of `ranks` numbers each: give it row by row (nkilib writes the latter two as zeros, here
   moe_expert_parallel_receive writes them).
   Errors: NULL_ARGUMENT, INVALID_SHAPE, INVALID_OPTION, INVALID_INDEX, OVERFLOW (also of a sum that does not fit in 32
   bits), MISALIGNED, OVERLAP, WORKSPACE, OUT_OF_MEMORY.
   Source: semantics of nkilib's build_all_to_all_v_metadata and build_all2all_dispatch_metadata. */
typedef struct moe_expert_parallel_send_args {
  int64_t T, E, K, ranks;      /* tokens, from 0; experts, experts per token, ranks, from 1 */
  int64_t row_elements;        /* counts and displacements are multiplied by it; 0 = 1 */
  int one_per_token;           /* 1: a token is sent once to a rank */
  const int32_t *expert_index; /* [T,K]; -1 = a slot without an expert */
  int32_t *send_counts;        /* [ranks] output */
  int32_t *send_displacements; /* [ranks] output: the counts before */
  int32_t *send_tokens;        /* [T*K] output (optional): the token of each row that is sent, then -1 */
  void *workspace;             /* (optional with an allocator) */
  size_t workspace_bytes;
} moe_expert_parallel_send_args;
MOE_API moe_status moe_expert_parallel_send(moe_context *ctx, const moe_expert_parallel_send_args *args);
MOE_API moe_status moe_expert_parallel_send_workspace_size(moe_context *ctx, const moe_expert_parallel_send_args *args,
                                                           size_t *bytes);

/* What rank `rank` receives, from the m_sizes of all ranks, which they gather first: rows of rank 0 first, those of a
   rank sorted by expert. Then grouped GEMM of the received rows has this rank's experts, topk 1 and permute_x, with
   local_m_sizes and local_gather_indices.
   Errors: NULL_ARGUMENT, INVALID_SHAPE (negative rank_m_sizes; fewer rows than are received), INVALID_OPTION,
   INVALID_INDEX (rank), OVERFLOW, MISALIGNED, OVERLAP. There is no workspace. */
typedef struct moe_expert_parallel_receive_args {
  int64_t E, ranks, rank;         /* experts, ranks, from 1; this rank, from 0 */
  int64_t row_elements;           /* as for sending */
  int64_t rows;                   /* room of local_gather_indices, from 0 */
  const int32_t *rank_m_sizes;    /* [ranks,E]: each rank's m_sizes */
  int32_t *receive_counts;        /* [ranks] output: from each rank */
  int32_t *receive_displacements; /* [ranks] output */
  int32_t *local_m_sizes;         /* [this rank's experts] output (optional) */
  int32_t *local_gather_indices;  /* [rows] output (optional): the received row at each position, then -1 */
} moe_expert_parallel_receive_args;
MOE_API moe_status moe_expert_parallel_receive(moe_context *ctx, const moe_expert_parallel_receive_args *args);

#include "end.h"

#endif
