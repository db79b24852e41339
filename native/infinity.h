/*
 * What the C side offers. This one file is read by the C compiler and by cffi's cdef(), so it holds declarations only.
 *
 * Every function answers 0, a count, or -errno. None prints, none aborts. Python calls them without the GIL.
 */

/* ---- cpu.c: which instruction sets this processor and its operating system run ---- */

#define INF_ISA_PLAIN 0
#define INF_ISA_AVX2 1
#define INF_ISA_AVX512 2

int inf_isa_available(int isa);         /* 1 or 0 */
int inf_isa_best(void);

/* ---- pool.c: threads that live as long as the pool ---- */

typedef struct inf_pool inf_pool;

/* cores: one core number per thread, or NULL to leave the threads where the scheduler puts them. */
int inf_pool_open(int threads, const int *cores, inf_pool **pool);
int inf_pool_threads(const inf_pool *pool);
/* Nobody may be inside a kernel of this pool. In a forked child the threads are gone and this does nothing. */
void inf_pool_close(inf_pool *pool);

/* ---- element types ---- */

#define INF_NONE 0
#define INF_F32 1
#define INF_BF16 2
#define INF_F16 3

/* ---- adam.c: one pass over one chunk ---- */

/* Elements [start, stop) of the chunk and the torch.optim.AdamW settings that hold for them; step is 1 at the first update. */
struct inf_adam_segment {
	int64_t start;
	int64_t stop;
	double lr;
	double beta1;
	double beta2;
	double eps;
	double weight_decay;
	int64_t step;
};

struct inf_adam_chunk {
	float *master;          /* in place */
	float *exp_avg;         /* in place */
	float *exp_avg_sq;      /* in place */
	const void *grad;
	void *param_out;        /* or NULL */
	int grad_type;
	int out_type;           /* INF_NONE where param_out is NULL */
	int64_t numel;
};

int inf_adamw(inf_pool *pool, int isa, const struct inf_adam_chunk *chunk, const struct inf_adam_segment *segments, size_t count, double grad_scale);

/* ---- convert.c: casts, sums, norms ---- */

int inf_cast(inf_pool *pool, int isa, const void *source, int source_type, void *target, int target_type, int64_t numel);
/* total += addend; *squares is the sum of squares of the new total, added in the order of inf_sum_of_squares. */
int inf_accumulate(inf_pool *pool, int isa, void *total, int total_type, const void *addend, int addend_type, int64_t numel, double *squares);
int inf_sum_of_squares(inf_pool *pool, int isa, const void *x, int type, int64_t numel, double *squares);

/* ---- crc32c.c ---- */

uint32_t inf_crc32c(uint32_t crc, const void *data, size_t nbytes);
uint32_t inf_crc32c_table(uint32_t crc, const void *data, size_t nbytes);       /* the plain version */

/* ---- memory.c: anonymous private memory on 2 MiB pages that a forked child does not share ---- */

int inf_memory_map(size_t nbytes, int threads, void **address);
int inf_memory_unmap(void *address, size_t nbytes);

/* ---- aio.c: reads and writes that are under way while others run ---- */

typedef struct inf_aio inf_aio;
typedef struct inf_request inf_request;
typedef struct inf_backend inf_backend;

#define INF_READ 0
#define INF_WRITE 1
#define INF_SYNC 2                      /* of a transfer in a scattered request: fsync(2) of its file, nbytes is 0 */

struct inf_aio_options {
	size_t block_bytes;             /* largest single transfer handed to the kernel */
	int queue_depth;                /* transfers in flight per worker */
	int workers[2];                 /* threads for reading and for writing */
	int64_t deadline_ns;            /* a transfer in flight longer than this means a dead drive */
	const inf_backend *backend;
	const inf_backend *fallback;    /* taken when the kernel refuses asynchronous I/O; NULL: refuse too */
};

struct inf_outcome {
	int error;                      /* 0 or -errno */
	int64_t started_ns;             /* CLOCK_MONOTONIC, first transfer handed to the kernel */
	int64_t finished_ns;            /* last completion */
	int64_t failed_offset;          /* byte in the file where the first failure was seen, -1 without one */
};

/* "libaio", "kernel", "threads"; NULL when it is not on this machine. */
const inf_backend *inf_backend_find(const char *name);

int inf_aio_open(const struct inf_aio_options *options, inf_aio **aio);
const char *inf_aio_backend_name(inf_aio *aio);
/*
 * The memory belongs to the device until the request finishes. When it finishes with -ETIMEDOUT it does so for ever.
 * Requests of one direction are started in the order in which they came.
 */
int inf_aio_submit(inf_aio *aio, int direction, int fd, int64_t offset, void *address, size_t nbytes, inf_request **request);

/* One of the many small transfers of a scattered request. */
struct inf_transfer {
	int64_t offset;
	uint32_t nbytes;                /* handed to the kernel in one piece, block_bytes or not */
	int32_t direction;
	int32_t file;                   /* index into fds */
	int32_t buffer;                 /* it moves address + buffer * stride; -1: the buffer of the slot it gets, -2: that slot's second one */
};

/* What became of it, CLOCK_MONOTONIC; all 0 when it was not begun. Without asynchronous calls issued_ns is begun_ns. */
struct inf_timing {
	int64_t begun_ns;               /* taken from the queue */
	int64_t issued_ns;              /* the kernel has it */
	int64_t done_ns;                /* its end was seen */
	int64_t depth;                  /* transfers of these threads under way, this one too, when it was begun */
};

struct inf_scatter {
	const int *fds;
	int files;
	const struct inf_transfer *transfers;
	size_t count;
	void *address;
	size_t stride;
	struct inf_timing *timings;     /* one per transfer, zeroed by the caller */
	int64_t until_ns;               /* CLOCK_MONOTONIC: no transfer is begun after it, the rest is left out; 0: no limit */
};

/*
 * Many small transfers of either direction, begun in their order by the threads of one lane (INF_READ or INF_WRITE), which keep their
 * queue depth over the end of one request and the start of the next. Everything the structure points to must stay until the request
 * finishes, as the memory must; the structure itself need not. The first failure ends the request: outcome.failed_offset is a byte of
 * the failed transfer's file, and that transfer has begun_ns and no done_ns.
 */
int inf_aio_submit_scatter(inf_aio *aio, int lane, const struct inf_scatter *scatter, inf_request **request);
/* Slots that the threads of a lane have: a scattered request with buffer -1 needs as many buffers, with -2 as many again behind them. */
int inf_aio_slots(inf_aio *aio, int lane);
/* Finishes everything, then stops. Does nothing in a forked child. */
void inf_aio_close(inf_aio *aio);

/* 1 when finished (outcome is filled), 0 when the time was up first. timeout_ns < 0 waits for as long as it takes. */
int inf_request_wait(inf_request *request, int64_t timeout_ns, struct inf_outcome *outcome);
/* The caller is done with the handle; the transfer itself goes on. */
void inf_request_release(inf_request *request);
